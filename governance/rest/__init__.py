"""The REST API of governance: propose, decide, follow, prove. Views translate; ``governance.operations`` decides."""
