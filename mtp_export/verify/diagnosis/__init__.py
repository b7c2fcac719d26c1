"""Diagnosis of failures: each variant undoes one known export bug; causes.py has the sentences."""
