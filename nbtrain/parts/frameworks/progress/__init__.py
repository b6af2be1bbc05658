"""What the board gets of TensorFlow, JAX and Keras, without any code of the user's."""
