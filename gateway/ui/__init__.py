"""Serves the page for people at /ui of the HTTP port: chat, and a live picture of the cluster.

Open cluster_picture.py first.
"""
