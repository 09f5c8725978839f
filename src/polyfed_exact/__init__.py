"""The exact methods of one vector each way, beside FedCET, and the loop that they are."""
