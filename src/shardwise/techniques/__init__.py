"""What can be done to a module so that ranks share its work: a folder for each technique, none of which imports another."""
