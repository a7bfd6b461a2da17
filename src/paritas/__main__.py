"""`python -m paritas` is the command `paritas`."""

from paritas.app.cli import main

if __name__ == "__main__":
    main(prog_name="paritas")
