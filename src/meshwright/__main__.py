"""`python -m meshwright` is the same program as `meshwright`."""

from meshwright.cli.main import entry

if __name__ == "__main__":
    entry()
