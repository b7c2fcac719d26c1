"""Program mtp-export as `python -m mtp_export`."""

from __future__ import annotations

from mtp_export.cli import main

if __name__ == "__main__":
    main()
