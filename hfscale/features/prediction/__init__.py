"""Multi-token prediction: layers behind the model that predict tokens further ahead."""
