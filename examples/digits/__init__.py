"""The bundled demo: a base and three experts that read handwritten digits, and the images to measure them."""
