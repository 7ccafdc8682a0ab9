"""The command line. Each command imports what it needs when it runs, so that `flashgen --help` answers at once."""
