"""Methods for groups and graphs of clients that came after the core's."""
