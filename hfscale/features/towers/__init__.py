"""Plan the towers of multimodal models: modules that encode pictures or sounds."""
