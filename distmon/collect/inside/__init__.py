"""Inside the model: activations, attention, experts and spectra of the modules that are watched."""
