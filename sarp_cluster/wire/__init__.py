"""What goes between processes: one schema, two wires (design §3 and §8, docs/protocol.md)."""
