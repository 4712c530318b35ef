"""The router's processes: started, fed with connections and snapshots, drained."""
