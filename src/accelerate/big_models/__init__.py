"""Models larger than one device's memory: sizes, device maps, loading, and offloading with prefetch. Internal."""
