import sys
from pathlib import Path

# Ranks and pytest must find the same modules; test folders are no packages in importlib mode.
sys.path.insert(0, str(Path(__file__).parent))
