"""Bytes of a checkpoint: folders, repositories of the Hub and object stores, all read alike."""
