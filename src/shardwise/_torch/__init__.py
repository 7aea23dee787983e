"""Private names of torch, a file for each subject. Nothing else in the package touches such names."""
