"""Host memory: page-locked allocators, buffer pools, the ledger, and the allocator that separates roles."""
