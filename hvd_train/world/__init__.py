"""Communication between ranks: `Place` and `World`, the world of one, and the only importer of Horovod.

Start with `world`, the protocol. `horovod_world` implements it, with `buckets` for gradients, `shared_memory` for
ranks of one host and `wire` for other values. `elastic_world` adds ranks that come and go.
"""
