"""polyfed on Flower, by its public API: a ServerApp that is polyfed's server, and a ClientApp that asks a site."""
