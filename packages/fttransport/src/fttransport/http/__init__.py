"""HTTP/1.1 for states: h11 for the grammar, blocking sockets for the bytes."""
