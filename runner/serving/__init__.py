"""One inference request from the moment it is accepted until its last byte has gone out."""
