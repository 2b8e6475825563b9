"""What each rank tells about itself: timing and throughput."""
