"""The prefix cache of a hybrid model: recurrent states in a radix tree beside the KV, and every slot accounted for.

A KDA state overwrites itself in place, so a prefix can be reused only where a copy of its state was kept. This package
decides where copies are taken, who owns each slot, and what goes when room is needed. It works on slot numbers, token
ids and counts: it reads no device value and never waits for the device.

Who calls whom, from the outside in:

    engine             one request's life: admit, extend, decode, donate, finish; sessions
    lease              what a running request has of the pools, and what its next forward keeps
    in_flight          prompts that are being prefilled: who waits for whose state
    checkpoints        states in the tree: match, insert, evict, forks, the cap per path
    radix_tree         token ids to KV, page by page; locks
    checkpoint_policy  which state or leaf goes first: the interface, and plain LRU
    replay_cost_policy the same by what it costs to miss: replay_cost in FLOPs and bytes, reuse_rates learned from what
                       was used, eviction_order to find the least of it
    policy_names       the policies by the names that a server is given
    state_slots        who owns each slot, and how far its life has come
    state_moves        the copies, as kernels on the forward stream
    limits             the grid, the interval, the cap, and the slots that a request needs
    ledger             recounts everything (I2)
    cache_report       draws the tree, and says what the pool is spent on
"""
