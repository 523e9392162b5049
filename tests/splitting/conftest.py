import sys
from pathlib import Path

# Test folders are no packages in importlib mode.
sys.path.insert(0, str(Path(__file__).parent))
