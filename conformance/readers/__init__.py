"""One reader per dialect: it accumulates a stream as the strictest official SDK does and stops at the first fault."""
