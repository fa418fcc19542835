"""What both engines do with a position method: choose its options, keep it legal while it trains."""
