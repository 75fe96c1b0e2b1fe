"""Router replay and what experts do."""
