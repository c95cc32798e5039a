"""What stands in for the world outside of the product: the only helpers of tests."""
