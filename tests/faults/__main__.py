"""`python -m tests.faults`, see the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
