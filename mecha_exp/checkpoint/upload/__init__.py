"""Outputs in buckets of S3: uploaded in parts while they are made, complete or not there."""
