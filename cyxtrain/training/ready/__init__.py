"""Ready callbacks, under Keras's names and with its arguments; `cyxtrain.callbacks` shows them."""
