"""The pages on which people sign in and keep their keys."""
