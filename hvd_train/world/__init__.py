"""Communication between ranks: `Place` and `World`, the world of one, and the
world of Horovod's ranks.

Start with `world`, the protocol. `horovod_world` implements it, with `buckets` for gradients and
`wire` for other values. `elastic_world` adds ranks that come and go.
"""
