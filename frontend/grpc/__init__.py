"""Chat over gRPC: `tandem.chat.v1.Chat`."""
