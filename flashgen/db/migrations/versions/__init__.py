"""One file for each schema version; its docstring says why the tables changed."""
