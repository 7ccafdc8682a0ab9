"""The Hopper backward families, in Gluon, for sm90."""
