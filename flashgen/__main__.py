"""`python -m flashgen`: the command, where its script is not on the path."""

from flashgen.cli.main import main

if __name__ == "__main__":
    main()
