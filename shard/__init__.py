"""DATA PLANE: one SARP index over one segment store, owned by one thread."""
