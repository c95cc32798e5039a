"""What programs that use Muster import; ``muster.client`` is for requests to models."""
