"""Steps of optimizers on what each rank has of the parameters, and which optimizers can take them."""
