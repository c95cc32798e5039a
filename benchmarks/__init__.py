"""What a request and a streamed chunk cost in Muster, measured beside nginx. See README.md in this folder."""
