"""Diagnosis of failures: each variant undoes one known export bug; causes/ has the sentences."""
