"""Web page at /ui of the HTTP port: chat, and a live picture of the cluster. Start with cluster_picture.py."""
