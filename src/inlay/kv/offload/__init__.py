"""Tiers below the KV pool: host memory, a folder on disk, and a server that several processes share.

A move copies KV, so a segment may lie in several tiers at once. Each tier evicts by its own rule::

             Demoter, before eviction from the pool
         +-------------------------------------------> HOST ----+
         |                                                      |
        POOL <------------------- Loader -----------------------+
         |                                                      |
         |   Saver, after computation                           |
         +-------------------------------------------> DISK ----+
         |                                              ^       |
         |                                Saver.promote |       |
         +-------------------------------------------> SHARED --+

HOST exists only below a pool in device memory. Moves run on background threads (``TransferThreads``), which never touch
the store. ``Residency.poll`` inserts loaded segments and releases copied ones between two steps of the engine.

States of a segment's KV, as ``Residency`` and the store tell them::

    missing -- computed --> resident -- save ----> saving ----> resident and below
       ^                     ^    |
       |                     |    +-- evicted --> demoting --> below (HOST)
       |                     |
       |                  poll, after the last layer
       |                     |
       +-- late, damaged -- loading <-- bring_up -- below <-- seek -- sought

``resident``: in the pool, and in the index (``SegmentStore.get``).
``demoting``: held in the pool during its copy to HOST (``Demoter.copying``).
``saving``: queued for a write, then held in the pool until it is copied (``Saver.waiting``).
``below``: a tier is believed to have it, or it is loading already (``Residency.below``).
``sought``: a tier with other writers must be asked or is being asked for it (``Residency.unsure``).
``loading``: its slots are taken, and it is not in the index yet (``Residency.bringing``). A segment that loads from
HOST is ``arriving``: readable layer by layer (``Residency.arriving``).
``missing``: in no tier, damaged or late, so it is recomputed (``Residency.why_missing``).

Modules:

``residency``: the one object that the engine uses. It joins the three movers.
``stack``: the pool and its tiers, the records of segments and the threads, as the movers share them.
``loader``: moves segments up. ``arrivals``: segments that are read before their last layer is resident.
``saver``: writes, removes and expires segments in the tiers, and promotes them to nearer tiers.
``demotion``: copies modules to HOST before the pool evicts them.
``tier``: the protocol of a tier. ``host``, ``disk``, ``shared``: the three tiers.
``link``: the connection to the server.
``disk_index``, ``files``: the rows and the files of DISK.
``record``, ``form``, ``codecs``: the description of a stored segment, its bytes, and their encodings.
``entries``: the entries of HOST and DISK in their order of eviction, and the counters of every tier.
"""
