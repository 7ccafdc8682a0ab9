"""A database or a run as one static page: `flashgen report`."""
