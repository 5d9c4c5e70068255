"""Outputs in buckets of S3 and Google: uploaded in parts while they are made, complete or not there."""
