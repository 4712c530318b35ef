"""HTTP/1.1 on both sides: clients' connections and engines'."""
