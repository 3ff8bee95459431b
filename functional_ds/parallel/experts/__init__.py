"""Expert parallelism of a model: routing, and the exchange of tokens between ranks that hold different experts."""
