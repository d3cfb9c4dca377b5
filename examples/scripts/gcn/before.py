"""Nodes of a graph by a graph convolutional network: one batch, the whole graph, and the best epoch on held-out nodes."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, x @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self, inputs, hidden, classes, dropout):
        super().__init__()
        self.gc1 = GraphConv(inputs, hidden)
        self.gc2 = GraphConv(hidden, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, adjacency):
        x = self.dropout(F.relu(self.gc1(x, adjacency)))
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


def load(nodes=200, classes=4):
    """Nodes that are linked to others of their class most of the time."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (nodes,), generator=draws)
    features = F.one_hot(labels, 12).to(torch.get_default_dtype())
    features += 1.5 * torch.randn(nodes, 12, generator=draws, dtype=features.dtype)
    likely = torch.where(labels[:, None] == labels, 0.08, 0.01)
    links = (torch.rand(nodes, nodes, generator=draws) < likely).to(features.dtype).triu(1)
    links = links + links.T + torch.eye(nodes, dtype=features.dtype)
    degrees = links.sum(1).rsqrt()
    return features, labels, (degrees[:, None] * links * degrees).to_sparse()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--dropout", type=float, default=0.5)
    args = parser.parse_args(argv)

    features, labels, adjacency = load()
    train, test = torch.arange(60), torch.arange(60, 200)
    criterion = nn.NLLLoss()
    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = GCN(12, 16, 4, args.dropout)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.l2)
        for _ in range(args.epochs):
            model.train()
            optimizer.zero_grad()
            loss = criterion(model(features, adjacency)[train], labels[train])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(features, adjacency)[test].argmax(1) == labels[test]).double().mean()
        print(f"loss {loss.item():.4f}, accuracy {accuracy:.3f}")
        models.append(model)
    return models


if __name__ == "__main__":
    main()
