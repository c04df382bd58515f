"""``python -m backlight`` is the ``backlight`` command, as torchrun needs it."""

from backlight.cli.app import main

if __name__ == "__main__":
    main()
