import sys
from pathlib import Path

# Helpers that the ranks of tests/distributed load too; test folders are no packages in importlib mode.
sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
