"""`python -m meshplan` is the command `meshplan`."""

from meshplan.cli.main import app

if __name__ == "__main__":
    app(prog_name="meshplan")
